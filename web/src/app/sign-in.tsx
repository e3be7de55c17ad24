/** Sign in with a key. The service keeps a session, and the page keeps nothing. */
import { useEffect, useId, useRef, useState } from "preact/hooks";
import { Rejection } from "../ui/notice";
import { refusal, signIn } from "./session";

export function SignIn() {
  const id = useId();
  const [key, setKey] = useState("");
  const [busy, setBusy] = useState(false);
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    await signIn(key.trim());
    setBusy(false);
  };
  return (
    <form class="card stack sign-in" onSubmit={(event) => void submit(event)}>
      <h1>Sign in</h1>
      <p class="soft">
        Use the API key that the operator of this service gave you. The page exchanges it for a session and does not
        store it.
      </p>
      <Rejection error={refusal.value} />
      <div class="field">
        <label for={id}>API key</label>
        <input
          id={id}
          type="password"
          autocomplete="off"
          spellcheck={false}
          placeholder="locum_…"
          value={key}
          onInput={(event) => setKey(event.currentTarget.value)}
          required
        />
      </div>
      <button type="submit" class="button primary" disabled={busy || key.trim() === ""}>
        {busy ? "Signing in …" : "Sign in"}
      </button>
    </form>
  );
}

/** Sign in again over the view, which stays as it is and is hidden. */
export function SignInAgain() {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => element.current?.showModal(), []);
  return (
    <dialog ref={element} class="cover" aria-label="Sign in again" onClose={() => element.current?.showModal()}>
      <div class="center">
        <SignIn />
      </div>
    </dialog>
  );
}
