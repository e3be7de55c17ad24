const MOST_REQUESTS = 6;

/** Call `read` for every item, six at once at most, until the signal aborts. Rejects as the first call that does. */
export async function readEach<T>(items: readonly T[], signal: AbortSignal, read: (item: T) => Promise<void>): Promise<void> {
  const waiting = items.values();
  const readOneByOne = async () => {
    for (const item of waiting) {
      if (signal.aborted) return;
      await read(item);
    }
  };
  await Promise.all(Array.from({ length: MOST_REQUESTS }, readOneByOne));
}
