"""Talk to a device that serves itself over TVM's RPC (``compress device serve``): calls, files, processes.

Invariant: no call waits for ever; a device that is lost is an error in words.
"""
