"""`shoal demo`: several unequal peers train one small language model on this machine; one is killed, one joins late."""
