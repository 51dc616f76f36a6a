"""Training that the project does itself; each recipe is a package of its own."""
