"""Tables of results, a module per subject: what terminals, Markdown and pages show."""
