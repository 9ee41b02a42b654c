"""What everything stands on: clocks, mailbox, child processes, logs, environment. Imports only `errors`."""
