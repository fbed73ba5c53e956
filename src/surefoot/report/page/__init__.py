"""The report page: one HTML file, its data and the live server."""
