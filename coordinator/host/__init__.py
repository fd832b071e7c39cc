"""The processes of one host: what is started, with which command lines, in which directory, and who watches it."""
