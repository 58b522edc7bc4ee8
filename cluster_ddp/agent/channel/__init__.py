"""Sealed lines over TCP, between the tasks of a job and its agent on the batch host; or a step's ranks and rank 0.

    task to server: NONCE, hexadecimal digits, once
    server to task: NONCE MAC, once: it proves that the server has the key, too
    both ways: MAC JSON, as often as there is something to say

MAC is HMAC-SHA256, with the job's key, of both nonces, and then of the number of the line and its JSON. So nobody
without the job's secret can speak for a task or for the server, or repeat what they have said. What they say is not
secret.

lines     a message as a sealed line, and the key
sockets   where it listens, and connections that notice when the other machine is gone
server    the side of the job, or of rank 0
client    the side of a task, or of another rank
"""
