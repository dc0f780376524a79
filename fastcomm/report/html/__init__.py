"""The page that people look at: one HTML file that needs no network.

`page` has the parts of a page, `render` makes a file of them, `glossary` defines every number.
Each other module answers what one question or one command shows.
"""
