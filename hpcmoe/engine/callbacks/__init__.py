"""Features that hang off the training loop, one a file. The loop itself, and what a step is: hpcmoe.engine.trainer."""
