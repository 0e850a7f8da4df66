"""Generate several texts at once: requests join a batch and leave it, row by row, and wait in a bounded queue.

Invariant: knows nothing of HTTP; a request's tokens do not depend on the requests beside it.
"""
