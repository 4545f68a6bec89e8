/* SIGINT, SIGTERM and SIGHUP while files are being written: the half-written one is removed before the command dies. */
#ifndef MOE4_CLI_INTERRUPT_H
#define MOE4_CLI_INTERRUPT_H

/* From now on these signals are remembered; those that were ignored stay so. */
void interrupt_hold(void);

/* EXIT_OK, or EXIT_FAILED once such a signal has come, which is reported. */
int interrupt_check(void);

/* From now on they kill again.  One that has come does so now. */
void interrupt_release(void);

#endif
