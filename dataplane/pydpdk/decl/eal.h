int rte_eal_init(int argc, char **argv);
int rte_eal_cleanup(void);
const char *rte_version(void);
const char *rte_strerror(int errnum);
int fc_rte_errno(void);
int fc_built_release(void);
