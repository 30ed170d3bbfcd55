"""A spool watched in a terminal: what `qflow top` shows.

`look` is what is known, with its history; `source` gets it, from an owner or from the disk; `columns`, `drawing` and
`pages` turn it into lines of text. None of them knows Textual; `app` and its screens and widgets do.
"""
