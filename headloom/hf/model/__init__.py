"""A family's model with Headloom's attention in it: attention, config, classes, masks, cache."""
