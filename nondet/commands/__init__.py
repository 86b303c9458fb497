"""What each command of the command line does: a function a command, its options in its signature, nothing heavy."""
