"""Talk to another process, with a limit and an error that names who did not answer: stores, doors, meetings, interfaces."""
