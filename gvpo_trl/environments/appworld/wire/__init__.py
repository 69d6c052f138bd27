"""What processes send each other: messages on sockets (`frames`), Python values in them (`values`), texts (`texts`).

It runs at every end of those sockets: in the trainer's process, in AppWorld's environment and in the restricted
interpreter. It imports the standard library and `text`, which imports nothing else.
"""
