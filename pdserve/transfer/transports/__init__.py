"""One file per way to move bytes; `transfer.transport` names them and imports one when it is asked for."""
