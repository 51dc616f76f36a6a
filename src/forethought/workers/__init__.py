"""Workers that come with the package, one per backend; imported when first used."""
