"""Models with Headloom's attention: from a loaded model, from sizes or a config; and back into plain weights."""
