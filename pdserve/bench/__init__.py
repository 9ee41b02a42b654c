"""`pdserve bench`: load on any OpenAI endpoint or `/generate`, and what its clients measure.

`load` sends requests at their times, `client` reads one stream, `metrics` summarises, `datasets` makes the prompts,
`campaign` runs sweeps, rounds and the search for the goodput, `html_report` and `charts` draw them. `results` joins
those of several services, `bars` draws these. The command lines are `pdserve/cli/bench.py` and `bench_compare.py`.
"""
