/** The hospital that a person last chose, by its id. It is kept in this browser until they sign out. */
const STORED = "locum-hospital";

/** An empty id forgets it. */
export function rememberHospital(id: string): void {
  try {
    if (id === "") localStorage.removeItem(STORED);
    else localStorage.setItem(STORED, id);
  } catch {
    // A browser that stores nothing keeps the choice in the address alone.
  }
}

export function rememberedHospital(): string | null {
  try {
    return localStorage.getItem(STORED);
  } catch {
    return null;
  }
}
