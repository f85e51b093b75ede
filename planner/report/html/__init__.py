"""The report of a plan as one HTML file that needs nothing else; `page.page` makes it."""
