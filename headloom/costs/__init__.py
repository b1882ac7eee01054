"""What a mechanism costs: parameters, FLOPs and cache bytes, counted from the built module."""
