"""The language: programs whose state is the very tokens that a model has seen.

| file | what |
|---|---|
| `api`, `outputs`, `ir` | what a program is written with, and the values that this makes |
| `program`, `batch`, `run` | functions that are programs; many runs of one; one run, its errors and its end |
| `writer`, `state`, `fork` | what a program writes to and reads from, and its branches |
| `line`, `ops`, `context` | a state's operations in order; what each does; what a state is made of |
| `feed`, `loop` | text and values that come later; where requests run |
| `trace` | what a program begins with |
| `choices`, `schema`, `dtypes`, `options` | how choices are judged; what outputs are and how they are drawn |
| `backend`, `backends/` | what a program asks of a model; who answers |
"""
