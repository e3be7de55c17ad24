/** Files of a scan with several channels: which case and channel a file's name says. */

/** `case7_FLAIR.nii.gz` and `case7_0001.nii.gz` are channel FLAIR of case7, for the channels T1 and FLAIR. */
export function splitName(file: string, channels: readonly string[]): { case: string; channel: string } | null {
  const stem = file.replace(/\.nii(\.gz)?$/i, "");
  const folded = stem.toLowerCase();
  for (const channel of [...channels].sort((one, other) => other.length - one.length)) {
    const name = channel.toLowerCase();
    if (folded === name) return { case: "", channel };
    if (folded.endsWith(`_${name}`) || folded.endsWith(`-${name}`)) return { case: stem.slice(0, -name.length - 1), channel };
  }
  const [, of = "", number = ""] = /^(?:(.*)_)?(\d{4})$/s.exec(stem) ?? [];
  const channel = number === "" ? undefined : channels[Number(number)];
  return channel === undefined ? null : { case: of, channel };
}

/** The files of each case by their channels, in the order of the files, and those of no channel. Throws Error. */
export function casesOf(files: readonly File[], channels: readonly string[]) {
  const cases = new Map<string, Map<string, File>>();
  const others: File[] = [];
  for (const file of files) {
    const found = splitName(file.name, channels);
    if (found === null) {
      others.push(file);
      continue;
    }
    const of = cases.get(found.case) ?? new Map<string, File>();
    const other = of.get(found.channel);
    if (other !== undefined) throw new Error(`${other.name} and ${file.name} are both channel ${found.channel}: leave one out.`);
    cases.set(found.case, of.set(found.channel, file));
  }
  for (const [name, of] of cases) {
    const missing = channels.filter((channel) => !of.has(channel));
    if (missing.length > 0) {
      const given = [...of.values()].map((file) => file.name).join(", ");
      throw new Error(
        `${name || given}: expected a file for each of the channels ${channels.join(", ")}, found ${given}: ${missing.join(", ")} is missing.`,
      );
    }
  }
  return { cases, others };
}

/** The end of a NIfTI's name, which names its channel; null where it has none. */
export const endOfName = (file: string): string | null => /([A-Za-z0-9][A-Za-z0-9-]{0,31})\.nii(\.gz)?$/i.exec(file)?.[1] ?? null;
