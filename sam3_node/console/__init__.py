"""The console: a web page that shows pictures and masks live, and sends clicks and names to the node.

It is a client like any other. It subscribes to frames and masks, and speaks the control socket. The node knows nothing
of it.
"""
