"""Why it went wrong: the catalogue of causes, and the checks that name one."""
