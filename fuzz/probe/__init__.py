"""`redraft probe`: what one restore costs a speculative driver, measured at some positions of a prompt by every route.

`measure` is what is measured, as data, and how runs are compared; `child` runs them in a process of its own; `table`
puts the results together; `writers` and `picture` are what people read.
"""
