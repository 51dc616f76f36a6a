"""Names of other packages."""
