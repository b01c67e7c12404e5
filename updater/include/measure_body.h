/* Kernels of one instruction set, compiled once for each type. The file that includes this has defined
 *     OP void gradients(const char *data, int type, uint64_t n, fcm_lanes *sums)
 *     OP void moves(const char *before, const char *after, int type, uint64_t n, fcm_lanes *sums) */
static void gradient(const void *data, int type, uint64_t n, fcm_lanes *sums)
{
    if (type == FCU_F32)
        gradients(data, FCU_F32, n, sums);
    else if (type == FCU_BF16)
        gradients(data, FCU_BF16, n, sums);
    else
        gradients(data, FCU_F16, n, sums);
}

static void weights(const void *before, const void *after, int type, uint64_t n, fcm_lanes *sums)
{
    if (type == FCU_F32)
        moves(before, after, FCU_F32, n, sums);
    else if (type == FCU_BF16)
        moves(before, after, FCU_BF16, n, sums);
    else
        moves(before, after, FCU_F16, n, sums);
}
