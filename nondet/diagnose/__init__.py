"""From a model to one verdict: triage in order, each step with its evidence and its exit, in one run file."""
