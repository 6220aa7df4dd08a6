"""The loss in the stacks that people train with, a module for each, which is imported only when asked for."""
