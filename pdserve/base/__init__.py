"""Modules that every other package uses: clocks, mailbox, child processes, logs, environment. Imports only `errors`."""
