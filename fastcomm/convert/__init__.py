"""Write a run in another format, for other tools."""
