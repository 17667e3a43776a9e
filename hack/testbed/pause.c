/* Holds a pod's namespaces and does nothing else. In C and static: it counts against the pod's memory limit. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void stop(int number) { (void)number; _exit(0); }
static void reap(int number) { (void)number; while (waitpid(-1, 0, WNOHANG) > 0) {} }

int main(void) {
  signal(SIGINT, stop);
  signal(SIGTERM, stop);
  signal(SIGCHLD, reap);
  for (;;) pause();
}
