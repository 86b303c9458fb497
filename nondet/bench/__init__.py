"""`nondet bench`: stock, invariant and rival kernels timed in one run, beside what the machine can do at most.

`cases` says what is timed, `work` counts bytes and operations, `timing` times, `rivals` finds what else is installed,
`bits` asks whether the cells of one weight shape give equal bits, `collect` runs it all, `summary` draws conclusions.
`summary` and `work` import no torch: reports are made from run files, on any machine.
"""
