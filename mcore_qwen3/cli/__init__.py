"""The command line: one small file a subcommand, and the only place that joins the other packages. Imports lazily."""
