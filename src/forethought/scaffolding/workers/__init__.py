"""Workers that come with the package, one per backend; imported only when asked for."""
