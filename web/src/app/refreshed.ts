/** What is read again and again while a view is open. */
import { useEffect, useState } from "preact/hooks";

/** What `load` returns, now, every `milliseconds`, and at once where `version` changes. */
export function useRefreshed<T>(load: () => Promise<T>, milliseconds: number, version: unknown = null): [T | null, unknown] {
  const [found, setFound] = useState<T | null>(null);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => {
    let over = false;
    let timer: ReturnType<typeof setTimeout>;
    const look = async () => {
      try {
        const next = await load();
        if (over) return;
        setFound(next);
        setError(null);
      } catch (problem) {
        if (!over) setError(problem);
      }
      if (!over) timer = setTimeout(() => void look(), milliseconds);
    };
    void look();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [version]);
  return [found, error];
}
