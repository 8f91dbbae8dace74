"""Bytes and messages: the memcached binary frame and the four change-stream dialects on it.

Pure: no sockets, no clock, no state beyond a receive buffer. Read `header` for the frame, `message` for how
a message is declared, `kv`, `tap`, `upr` and `dcp` for the messages, `dialect` for the tables that find one.
"""
