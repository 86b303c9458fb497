"""What each command of the command line does. `nondet.cli` only parses."""
