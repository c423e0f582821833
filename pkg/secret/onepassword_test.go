package secret

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// standInOp is an `op` that reads its behaviour from a file beside it, records its
// arguments, and knows one vault.
const standInOp = `#!/bin/sh
dir=$(dirname "$0")
echo "$@" >>"$dir/args"
[ "$1" = inject ] || { echo '[ERROR] 2024/01/02 03:04:05 unknown command' >&2; exit 1; }
case $(cat "$dir/mode") in
signed-out) echo '[ERROR] 2024/01/02 03:04:05 You are not currently signed in. Please run ` + "`op signin --help`" + ` for instructions' >&2; exit 1;;
hang) exec sleep 60;;
huge) exec yes SENTINEL-huge;;
leak) echo 'SENTINEL-leak first'; echo 'debug SENTINEL-leak' >&2; echo "[ERROR] 2024/01/02 03:04:05 odd trouble with SENTINEL-leak first and $OP_SESSION_my and $OP_CONNECT_TOKEN" >&2; exit 1;;
say:*) m=$(cat "$dir/mode"); echo 'not an error line' >&2; echo "[ERROR] 2024/01/02 03:04:05 ${m#say:}" >&2; exit 1;;
silent) echo SENTINEL-silent >&2; exit 1;;
garbage) echo SENTINEL-garbage; exit 0;;
long:*) m=$(cat "$dir/mode"); head -c "${m#long:}" /dev/zero | tr '\0' x; exec sed 's|{{ op://v/one/field }}||';;
esac
in=$(cat; echo .); in=${in%.}
case $in in *missing*) echo '[ERROR] 2024/01/02 03:04:05 could not resolve item UUID for item missing: could not find item missing in vault v' >&2; exit 1;; esac
printf %s "$in" | sed 's|{{ op://v/multi/field }}|line one\nline two|; s|{{ op://v/\([a-z]*\)/field }}|value-of-\1|'
`

func useOp(t *testing.T, mode string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	write(t, dir, "mode", mode, 0o600)
	if err := os.WriteFile(filepath.Join(dir, "op"), []byte(standInOp), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("OP_SERVICE_ACCOUNT_TOKEN", "")
	t.Setenv("OP_ACCOUNT", "")
	t.Setenv("OP_SESSION_my", "SENTINEL-session")
	t.Setenv("OP_CONNECT_TOKEN", "SENTINEL-connect")
	return dir
}

func TestOpCommand(t *testing.T) {
	dir := useOp(t, "fine")
	got, err := Resolve(t.Context(), []Ref{{"A", "op://v/one/field"}, {"B", "op://v/multi/field"}, {"C", "op://v/two/field"}}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"A": "value-of-one", "B": "line one\nline two", "C": "value-of-two"} {
		if got[name].Reveal() != want {
			t.Errorf("%s = %q, want %q", name, got[name].Reveal(), want)
		}
	}
	if args, _ := os.ReadFile(filepath.Join(dir, "args")); string(args) != "inject\n" {
		t.Errorf("op was called as %q, want one inject", args)
	}
}

func TestOpCommandAtTheLimit(t *testing.T) {
	for length, fits := range map[int]bool{MaxBytes: true, MaxBytes + 1: false} {
		useOp(t, fmt.Sprintf("long:%d", length))
		got, err := Resolve(t.Context(), []Ref{{"A", "op://v/one/field"}}, Options{})
		if fits && (err != nil || len(got["A"].Reveal()) != length) {
			t.Errorf("Resolve of %d bytes = %d bytes, %v, want all", length, len(got["A"].Reveal()), err)
		}
		if !fits && fail.CodeOf(err) != fail.Secret {
			t.Errorf("Resolve of %d bytes = %v, want code %v", length, err, fail.Secret)
		}
	}
}

func TestOpCommandFailures(t *testing.T) {
	for _, c := range []struct {
		mode, want, hint string
		code             fail.Code
	}{
		{"signed-out", "not currently signed in", `eval "$(op signin)"`, fail.Secret},
		{"hang", "did not answer within", "unlock 1Password", fail.Secret},
		{"huge", "larger than the limit", "", fail.Secret},
		{"leak", "odd trouble with [redacted]", "op whoami", fail.Secret},
		{"garbage", "unexpected format", "", fail.Secret},
		{"silent", "op failed without an error message", "op whoami", fail.Secret},
	} {
		t.Run(c.mode, func(t *testing.T) {
			useOp(t, c.mode)
			opts := Options{Timeout: patient}
			if c.mode == "hang" {
				opts.Timeout = time.Second
			}
			_, err := Resolve(t.Context(), []Ref{{"A", "op://v/one/field"}, {"B", "op://v/two/field"}}, opts)
			if fail.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.want) || !strings.Contains(fail.HintOf(err), c.hint) {
				t.Errorf("Resolve = %v (hint %q), want %q (hint %q)", err, fail.HintOf(err), c.want, c.hint)
			}
			if strings.Contains(fmt.Sprint(err), "SENTINEL") {
				t.Errorf("Resolve = %v, want no output of op in the error", err)
			}
		})
	}
	t.Run("one item missing", func(t *testing.T) {
		useOp(t, "fine")
		_, err := Resolve(t.Context(), []Ref{{"A", "op://v/one/field"}, {"B", "op://v/missing/field"}}, Options{})
		if err == nil || !strings.HasPrefix(err.Error(), "secret B (op): could not resolve item") || !strings.HasPrefix(fail.HintOf(err), "op item list") {
			t.Errorf("Resolve = %v (hint %q), want an error for B alone, a hint with op item list", err, fail.HintOf(err))
		}
	})
	t.Run("no op", func(t *testing.T) {
		useOp(t, "fine")
		t.Setenv("PATH", t.TempDir())
		_, err := Resolve(t.Context(), []Ref{{"A", "op://v/one/field"}}, Options{})
		if fail.CodeOf(err) != fail.Secret || !strings.Contains(err.Error(), "and OP_SERVICE_ACCOUNT_TOKEN is not set") {
			t.Errorf("Resolve = %v, want \"and OP_SERVICE_ACCOUNT_TOKEN is not set\" (code %v)", err, fail.Secret)
		}
	})
}

// The text of op's error determines the hint, and whether the error is about one
// reference. Only then is each reference tried alone, because otherwise the user
// would have to unlock 1Password once for each.
func TestOpMessages(t *testing.T) {
	dir := useOp(t, "")
	for _, c := range []struct {
		message, hint string
		code          fail.Code
		perItem       bool
	}{
		{"You are not currently signed in.", `eval "$(op signin)"`, fail.Secret, false},
		{"account is not signed in", `eval "$(op signin)"`, fail.Secret, false},
		{"Session expired, sign in", `eval "$(op signin)"`, fail.Secret, false},
		{"No accounts configured", "op account add", fail.Secret, false},
		{"connecting to desktop app: refused", "start and unlock 1Password, and turn on", fail.Secret, false},
		{"the Desktop has no item", "start and unlock 1Password", fail.Secret, false},
		{"authorization prompt dismissed", "unlock 1Password and try again", fail.Secret, false},
		{"bad service account token", "set OP_SERVICE_ACCOUNT_TOKEN", fail.Secret, false},
		{"service account was deleted", "check OP_SERVICE_ACCOUNT_TOKEN", fail.Secret, false},
		{"401: Unauthorized", "check OP_SERVICE_ACCOUNT_TOKEN, or run", fail.Secret, false},
		{"rate limit exceeded", "wait; op service-account", fail.Secret, false},
		{"unknown command \"inject\"", "install version 2", fail.Host, false},
		{"lookup: no such host", "check the network", fail.Secret, false},
		{"dial tcp: refused", "check the network", fail.Secret, false},
		{"\"x\" isn't an item", "op item list", fail.Secret, true},
		{"vaultNotFound", "op vault list", fail.Secret, true},
		{"\"v\" isn't a vault in this account", "op vault list", fail.Secret, true},
		{"could not find vault of the item", "op vault list", fail.Secret, true},
		{"no item matched", "op item list --vault VAULT", fail.Secret, true},
		{"no vault matched", "op vault list", fail.Secret, true},
		{"no field matched", "op item get ITEM", fail.Secret, true},
		{"no section matched", "op item get ITEM", fail.Secret, true},
		{"invalid secret reference", "op read REFERENCE", fail.Secret, true},
		{"something new", "op whoami", fail.Secret, true},
		{strings.Repeat("long ", 60), "op whoami", fail.Secret, true},
	} {
		write(t, dir, "mode", "say:"+c.message, 0o600)
		refs := []Ref{{"A", "op://v/one/field"}, {"B", "op://v/two/field"}}
		for n := 1; n <= len(refs); n++ {
			write(t, dir, "args", "", 0o600)
			_, err := Resolve(t.Context(), refs[:n], Options{Timeout: patient})
			if fail.CodeOf(err) != c.code || !strings.HasPrefix(fail.HintOf(err), c.hint) {
				t.Errorf("Resolve with message %q of op = code %v, hint %q, want %v, %q", c.message, fail.CodeOf(err), fail.HintOf(err), c.code, c.hint)
			}
			if want := "secret A (op): " + c.message[:min(len(c.message), 190)]; err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > n*(len("secret A (op): ")+210)+40 {
				t.Errorf("Resolve with message %q of op = %v, want %q, cut to its bound", c.message, err, want)
			}
			want := 1
			if c.perItem && n > 1 {
				want += n
			}
			if args, _ := os.ReadFile(filepath.Join(dir, "args")); strings.Count(string(args), "\n") != want {
				t.Errorf("calls of op with message %q for %d references = %d, want %d", c.message, n, strings.Count(string(args), "\n"), want)
			}
		}
	}
}

func TestOnePasswordSDK(t *testing.T) {
	useOp(t, "fine")
	var calls []string
	batch := func(_ context.Context, token, account string, refs []string) (map[string]string, map[string]error, error) {
		calls = append(calls, fmt.Sprintf("%s|%s|%d", token, account, len(refs)))
		if account == "unknown" || token == "SENTINEL-revoked" {
			return nil, nil, errors.New("error initializing client: token " + token + " is refused\nstack of the core")
		}
		return map[string]string{"op://v/one/field": "sdk"}, map[string]error{"op://v/gone/field": errors.New("the item is not found in the vault")}, nil
	}
	opts := Options{OnePassword: batch, Desktop: true}

	t.Setenv("OP_SERVICE_ACCOUNT_TOKEN", "ops_token")
	_, err := Resolve(t.Context(), []Ref{{"A", "op://v/one/field"}, {"B", "op://v/gone/field"}}, opts)
	if err == nil || !strings.HasPrefix(err.Error(), "secret B (op): the item is not found") {
		t.Errorf("Resolve = %v, want an error for B alone", err)
	}
	got, err := Resolve(t.Context(), []Ref{{"A", "op://v/one/field"}}, opts)
	if err != nil || got["A"].Reveal() != "sdk" {
		t.Errorf("Resolve(A) = %q, %v, want \"sdk\"", got["A"].Reveal(), err)
	}
	t.Setenv("OP_SERVICE_ACCOUNT_TOKEN", "SENTINEL-revoked")
	_, err = Resolve(t.Context(), []Ref{{"A", "op://v/one/field"}}, opts)
	if err == nil || strings.Contains(err.Error(), "SENTINEL") || strings.Contains(err.Error(), "stack") {
		t.Errorf("Resolve = %v, want the first line without the token", err)
	}

	// The desktop app is tried first, then the command if that fails.
	t.Setenv("OP_SERVICE_ACCOUNT_TOKEN", "")
	t.Setenv("OP_ACCOUNT", "unknown")
	got, err = Resolve(t.Context(), []Ref{{"A", "op://v/two/field"}}, opts)
	if err != nil || got["A"].Reveal() != "value-of-two" {
		t.Errorf("Resolve(A) = %q, %v, want \"value-of-two\"", got["A"].Reveal(), err)
	}
	if s := strings.Join(calls, " "); s != "ops_token||2 ops_token||1 SENTINEL-revoked||1 |unknown|1" {
		t.Errorf("calls of the SDK = %q, want %q", s, "ops_token||2 ops_token||1 SENTINEL-revoked||1 |unknown|1")
	}

	// A reference without an answer.
	t.Setenv("OP_SERVICE_ACCOUNT_TOKEN", "ops_token")
	if _, err := Resolve(t.Context(), []Ref{{"A", "op://v/two/field"}}, opts); err == nil || !strings.Contains(err.Error(), "1Password returned no answer") {
		t.Errorf("Resolve without an answer = %v, want \"1Password returned no answer\"", err)
	}

	// The SDK resolves with a token, or with an app that this build can use;
	// otherwise op does.
	for _, c := range []struct {
		name, token, account string
		opts                 Options
		noOp                 bool
		want, wantErr        string
	}{
		{"the app answers", "", "mine", opts, false, "sdk", ""},
		{"the app answers and there is no op", "", "mine", opts, true, "sdk", ""},
		{"the app refuses and there is no op", "", "unknown", opts, true, "", "is refused"},
		{"a build without the app", "", "mine", Options{OnePassword: batch}, false, "value-of-one", ""},
		{"a build without the SDK", "ops_token", "mine", Options{Desktop: true}, false, "value-of-one", ""},
		{"no account", "", "", opts, false, "value-of-one", ""},
		{"no account and no op", "", "", opts, true, "", "and OP_SERVICE_ACCOUNT_TOKEN is not set"},
	} {
		t.Run(c.name, func(t *testing.T) {
			useOp(t, "fine")
			t.Setenv("OP_SERVICE_ACCOUNT_TOKEN", c.token)
			t.Setenv("OP_ACCOUNT", c.account)
			if c.noOp {
				t.Setenv("PATH", t.TempDir())
			}
			got, err := Resolve(t.Context(), []Ref{{"A", "op://v/one/field"}}, c.opts)
			if got["A"].Reveal() != c.want || (err == nil) != (c.wantErr == "") || err != nil && !strings.Contains(err.Error(), c.wantErr) {
				t.Errorf("Resolve(A) = %q, %v, want %q, %q", got["A"].Reveal(), err, c.want, c.wantErr)
			}
		})
	}
}
