"""Run files to reports: terminal, markdown, HTML. One file per output; what is said is decided apart from how it looks.

`verdict` judges, `content` gathers, `draw_*` lay out; `terminal`, `markdown` and `html` only write.
Nothing here imports torch: a run file made on one machine is read on another.
"""
