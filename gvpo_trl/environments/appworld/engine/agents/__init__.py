"""The host of agents: it forks one restricted interpreter for each episode, which runs the agent's code.

It runs in AppWorld's environment (see `engine`), without a world, data or ground truth. The trainer's side sends code
and gets back what a step printed; API calls go to the process that holds the world.
"""
