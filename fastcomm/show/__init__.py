"""How results look: tables, terminal, files, pages, charts. Nothing here knows a question."""
