package secret

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const (
	sentinel = "SENTINEL-4f2c/9+x y"
	// patient bounds waits for events that must happen, on any machine.
	patient = 5 * time.Minute
)

// TestMain lets this binary act as the resolver child of ResolveInChild.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == ChildCommand {
		if os.Getenv("OP_TEST_CRASH") != "" {
			fmt.Print(`{"values":{"A":"` + sentinel)
			panic(sentinel)
		}
		if err := Main(context.Background(), os.Stdin, os.Stdout, Options{Timeout: patient}); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(testenv.Run(m))
}

func TestValueNeverPrints(t *testing.T) {
	v := NewValue(sentinel)
	hidden := struct{ v Value }{v}
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "v", v, "in", struct{ V Value }{v})
	js, err := json.Marshal(map[string]any{"v": v, "p": &v, "s": struct{ V Value }{v}})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{
		fmt.Sprint(v), fmt.Sprintf("%v %+v %#v %s %q %x %d", v, v, v, v, v, v, v), fmt.Sprintf("%v %+v %#v", hidden, hidden, &hidden),
		fmt.Sprint([]Value{v}, map[string]Value{"k": v}), string(js), log.String(), v.String(), v.GoString(),
	} {
		if strings.Contains(s, "SENTINEL") || strings.Contains(s, "53454e54") {
			t.Errorf("printed value = %q, want it hidden", s)
		}
	}
	if v.Reveal() != sentinel || (Value{}).Reveal() != "" {
		t.Errorf("Reveal = %q, of the zero value %q, want %q, \"\"", v.Reveal(), (Value{}).Reveal(), sentinel)
	}
}

func TestParseRef(t *testing.T) {
	t.Setenv("HOME", "/home/u")
	for _, c := range []struct{ name, source, want string }{
		{"TOKEN", "op://vault/item/field", "op://vault/item/field"},
		{"TOKEN", "op://My Vault/an item/section/one-time password?attribute=otp", "op://My Vault/an item/section/one-time password?attribute=otp"},
		{"KEY", "op://v/i/private key?ssh-format=openssh", "op://v/i/private key?ssh-format=openssh"},
		{"_X1", "env:lower_Case", "env:lower_Case"},
		{"X", "file:~/a/../b", "file:/home/u/b"},
		{"X", "file:~", "file:/home/u"},
		{"X", "cmd:pass show x | head -1", "cmd:pass show x | head -1"},
		{"lower", "env:X", ""},
		{"", "env:X", ""},
		{"1X", "env:X", ""},
		{strings.Repeat("X", 129), "env:X", ""},
		{"PATH", "env:X", ""},
		{"LD_PRELOAD", "env:X", ""},
		{"X", "", ""},
		{"X", sentinel, ""},
		{"X", "op:" + sentinel, ""},
		{"X", "op://" + sentinel, ""},
		{"X", "op://v/" + sentinel + "}}/f", ""},
		{"X", "op://v/i", ""},
		{"X", "op://v//f", ""},
		{"X", "op://v/i/ f", ""},
		{"X", "op://v/i/s/f/g", ""},
		{"X", "op://v/i/f?x=" + sentinel, ""},
		{"X", "op://v/i/$" + sentinel, ""},
		{"X", "env:" + sentinel, ""},
		{"X", "env:", ""},
		{"X", "file:relative/" + sentinel, ""},
		{"X", "file:~other/x", ""},
		{"X", "cmd: ", ""},
		{"X", "cmd:a\nb", ""},
		{"X", "vault:work/a b:c", "vault:work/a b:c"},
		{"X", "vault:" + sentinel, ""},
		{"X", "vault:/a:" + sentinel, ""},
		{"X", "keychain:https://example.org/me", "keychain:https://example.org/me"},
		{"X", "keychain:SENTINEL", ""},
		{"X", "keychain:/SENTINEL", ""},
		{"X", "keychain:SENTINEL/", ""},
		{"X", "age:~/a/../b.age", "age:/home/u/b.age"},
		{"X", "age:" + sentinel, ""},
		{"X", "pass:" + sentinel, ""},
		{"X", "cmd:" + strings.Repeat("x", maxSource-len("cmd:")), "cmd:" + strings.Repeat("x", maxSource-len("cmd:"))},
		{"X", "cmd:" + strings.Repeat("x", maxSource-len("cmd:")+1), ""},
		{strings.Repeat("X", 128), "env:X", "env:X"},
		{"DYLD_INSERT_LIBRARIES", "env:X", ""},
		{"X", "cmd:a\x7fb", ""},
		{"X", "cmd:a\u0085b", ""},
		{"X", "cmd:a\xffb", ""},
	} {
		r, err := ParseRef(c.name, c.source)
		if c.want == "" {
			if fail.CodeOf(err) != fail.Usage || strings.Contains(fmt.Sprint(err, fail.HintOf(err)), "SENTINEL") {
				t.Errorf("ParseRef(%q, %q) = %v, %q; want a usage error that does not repeat the source", c.name, c.source, err, fail.HintOf(err))
			}
			continue
		}
		if err != nil || r.Source != c.want || r.Name != c.name {
			t.Errorf("ParseRef(%q, %q) = %v, %v, want %s %q", c.name, c.source, r, err, c.name, c.want)
		}
	}
}

// An error names the problem and shows the correct form.
func TestParseRefSays(t *testing.T) {
	for _, c := range []struct{ source, want, hint string }{
		{"op://v/i/$/f", "part 3 of the op:// reference is empty", "op://vault/item/field; copy it with"},
		{"op://v/i", "must have a vault, an item, optionally a section, and a field", "op://vault/item/field; copy it with"},
		{"op://v/i/f?x=y", "? in an op:// reference must be followed", "op://vault/item/field; copy it with"},
		{"env:1", "env: must be followed by the name", "env:NAME"},
		{"file:x", "file: must be followed by an absolute path", "file:~/path or file:/path"},
		{"cmd:", "cmd: must be followed by a shell command", "cmd:gh auth token"},
		{"vault:a", "vault: must be followed by the path of a secret, a colon and a key", "vault:path:key"},
		{"vault:a/../b:c", "the path of a vault: source must not", "vault:path:key"},
		{"keychain:a", "keychain: must be followed by a service, a slash and an account", "keychain:service/account"},
		{"age:x", "age: must be followed by an absolute path", "age:~/path or age:/path"},
		{"x", "must start with op://, env:, file:, cmd:, vault:, keychain: or age:", sourceHint},
		{"cmd:a\nb", "longer than 4096 bytes or contains control characters", sourceHint},
	} {
		if _, err := ParseRef("X", c.source); err == nil || !strings.HasPrefix(err.Error(), "secret X: ") || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(fail.HintOf(err), c.hint) {
			t.Errorf("ParseRef(X, %q) = %v (hint %q), want %q (hint %q)", c.source, err, fail.HintOf(err), c.want, c.hint)
		}
	}
}

func TestCheckAndWarnings(t *testing.T) {
	dir := t.TempDir()
	open := write(t, dir, "open", "x", 0o644)
	private := write(t, dir, "private", "x", 0o600)
	empty := write(t, dir, "empty", "", 0o600)
	t.Setenv("IS_SET", "1")
	refs := []Ref{
		{"A", "env:IS_SET"},
		{"B", "file:" + open},
		{"C", "file:" + private},
		{"D", "cmd:" + open},
		{"E", "op://v/i/f"},
		{"F", "env:IS_NOT_SET"},
		{"G", "file:" + empty},
		{"H", "file:" + dir},
		{"I", "file:" + dir + "/missing"},
		{"A", "cmd:true"},
		{"J", "bad"},
	}
	var got []string
	for _, err := range Check(refs) {
		got = append(got, err.Error()[:len("secret X")])
	}
	if s := strings.Join(got, ","); s != "secret F,secret G,secret H,secret I,secret A,secret J" {
		t.Errorf("Check found %q, want secrets F, G, H, I, A, J", s)
	}
	if w := Warnings(refs); len(w) != 2 || !strings.Contains(w[0], "secret B") || !strings.Contains(w[1], "secret H") {
		t.Errorf("Warnings = %q, want one for secret B, one for secret H", w)
	}
	var most []Ref
	for i := range MaxSecrets {
		most = append(most, Ref{fmt.Sprintf("N%d", i), "env:IS_SET"})
	}
	if errs := Check(most); len(errs) != 0 {
		t.Errorf("Check of %d secrets = %v, want none", len(most), errs)
	}
	if errs := Check(make([]Ref, MaxSecrets+1)); len(errs) != MaxSecrets+1 || !strings.Contains(errs[0].Error(), "limit") {
		t.Errorf("Check of %d secrets = %d errors, want %d with \"limit\"", MaxSecrets+1, len(errs), MaxSecrets+1)
	}
}

func TestResolveLocal(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TOKEN_SRC", sentinel)
	pem := "-----BEGIN\nabc\n-----END\n"
	got, err := Resolve(t.Context(), []Ref{
		{"A", "env:TOKEN_SRC"},
		{"B", "file:" + write(t, dir, "line", sentinel+"\n", 0o600)},
		{"C", "file:" + write(t, dir, "pem", pem, 0o600)},
		{"D", "cmd:printf '%s\\r\\n' \"$TOKEN_SRC\"; echo noise >&2"},
		{"E", "cmd:sleep 1000 & echo with-a-child-left-behind"},
		{"F", "file:" + write(t, dir, "full", strings.Repeat("x", MaxBytes), 0o600)},
		{"G", "cmd:head -c " + strconv.Itoa(MaxBytes) + " /dev/zero | tr '\\0' x"},
	}, Options{Timeout: patient})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"A": sentinel, "B": sentinel, "C": pem, "D": sentinel, "E": "with-a-child-left-behind", "F": strings.Repeat("x", MaxBytes), "G": strings.Repeat("x", MaxBytes)} {
		if got[name].Reveal() != want {
			t.Errorf("%s = %q, want %q", name, got[name].Reveal(), want)
		}
	}
}

func TestResolveFailures(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", "/usr/bin:/bin")
	fifo := filepath.Join(dir, "missing")
	big := write(t, dir, "big", strings.Repeat(sentinel, MaxBytes/len(sentinel)+1), 0o600)
	const tooLong = "did not end within"
	for _, c := range []struct{ source, want string }{
		{"env:IS_NOT_SET", "not set"},
		{"file:" + fifo, "does not exist"},
		{"file:/dev/zero", "not a regular file"},
		{"file:" + big, "larger than the limit of 256 KiB"},
		{"file:" + write(t, dir, "blank", " \n", 0o600), "empty"},
		{"file:" + write(t, dir, "latin", sentinel+"\xe9", 0o600), "not UTF-8"},
		{"file:" + write(t, dir, "nul", sentinel+"\x00", 0o600), "NUL"},
		{"cmd:echo '" + sentinel + "'; echo '" + sentinel + "' >&2; exit 3", "the command failed (exit status 3)"},
		{"cmd:echo '" + sentinel + "'; sleep 1000", tooLong},
		{"cmd:yes '" + sentinel + "'", "larger than the limit"},
		{"cmd:true", "empty"},
		{"cmd:read x </dev/tty && echo $x", "exit status"},
		{"file:/dev/null/below", "not a directory"},
		{"cmd:kill -9 $$", "the command failed (signal: killed)"},
	} {
		opts := Options{Timeout: patient}
		if c.want == tooLong {
			opts.Timeout = time.Second
		}
		_, err := Resolve(t.Context(), []Ref{{"TOKEN", c.source}}, opts)
		if fail.CodeOf(err) != fail.Secret || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "secret TOKEN (") {
			t.Errorf("Resolve(%.40s) = %v, want a secret error with %q", c.source, err, c.want)
			continue
		}
		if s := err.Error() + fail.HintOf(err); strings.Contains(s, "SENTINEL") {
			t.Errorf("Resolve(%.40s) = %q, want no content in the error", c.source, s)
		}
	}
	_, err := Resolve(t.Context(), []Ref{{"A", "env:IS_NOT_SET"}, {"B", "cmd:false"}, {"C", "cmd:echo fine"}}, Options{})
	if err == nil || !strings.Contains(err.Error(), "secret A") || !strings.Contains(err.Error(), "secret B") || strings.Contains(err.Error(), "secret C") {
		t.Errorf("Resolve of A, B, C = %v, want errors for A and B alone", err)
	}
	if _, err := Resolve(t.Context(), make([]Ref, MaxSecrets+1), Options{}); fail.CodeOf(err) != fail.Usage {
		t.Errorf("Resolve of %d secrets = %v, want code %v", MaxSecrets+1, err, fail.Usage)
	}
	t.Setenv("HOME", "")
	if _, err := Resolve(t.Context(), []Ref{{"A", "file:~/x"}}, Options{}); err == nil || !strings.Contains(err.Error(), "HOME is not set") {
		t.Errorf("Resolve(file:~/x) without HOME = %v, want \"HOME is not set\"", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Resolve(ctx, []Ref{{"A", "cmd:sleep 1000"}}, Options{}); err == nil || ctx.Err() == nil {
		t.Errorf("cancelled Resolve = %v (context %v), want an error after its end", err, ctx.Err())
	}
}

func TestResolveInChild(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("TOKEN_SRC", sentinel)
	t.Setenv("UNRELATED", "must-not-reach-the-child")
	got, err := ResolveInChild(t.Context(), self, []Ref{{"A", "env:TOKEN_SRC"}, {"B", "cmd:tr '\\0' ' ' </proc/$PPID/cmdline"}})
	if err != nil {
		t.Fatal(err)
	}
	if got["A"].Reveal() != sentinel {
		t.Errorf("A = %q, want %q", got["A"].Reveal(), sentinel)
	}
	if line := got["B"].Reveal(); !strings.HasSuffix(strings.TrimSpace(line), ChildCommand) {
		t.Errorf("arguments of the child = %q, want %q last", line, ChildCommand)
	}

	got, err = ResolveInChild(t.Context(), self, []Ref{{"A", "env:IS_NOT_SET"}, {"B", "env:TOKEN_SRC"}})
	if failed, ok := errors.AsType[Unresolved](err); !ok || len(failed) != 1 || failed["A"] == nil || got["B"].Reveal() != os.Getenv("TOKEN_SRC") {
		t.Errorf("ResolveInChild(IS_NOT_SET, TOKEN_SRC) = %d values, %v, want the value of B and an error of A", len(got), err)
	}
	if fail.CodeOf(err) != fail.Secret || fail.HintOf(err) != "export IS_NOT_SET=…" {
		t.Errorf("ResolveInChild(IS_NOT_SET) = %v (hint %q), want code %v, hint \"export IS_NOT_SET=…\"", err, fail.HintOf(err), fail.Secret)
	}

	t.Setenv("OP_TEST_CRASH", "1")
	_, err = ResolveInChild(t.Context(), self, []Ref{{"A", "env:TOKEN_SRC"}})
	if fail.CodeOf(err) != fail.Secret || strings.Contains(err.Error(), "SENTINEL") {
		t.Errorf("ResolveInChild of a crashing child = %v, want code %v without the secret", err, fail.Secret)
	}
	if got, err := ResolveInChild(t.Context(), "/nonexistent", nil); err != nil || len(got) != 0 {
		t.Errorf("ResolveInChild of no secrets = %v, %v, want none, nil", got, err)
	}
}

// The child gets the variables that a resolver needs, and the whole environment
// only for a command of the user.
func TestChildEnvironment(t *testing.T) {
	needed := []string{
		"PATH=1", "HOME=1", "USER=1", "LOGNAME=1", "TMPDIR=1", "LANG=1", "TZ=1", "DISPLAY=1", "WAYLAND_DISPLAY=1", "DBUS_SESSION_BUS_ADDRESS=1",
		"HTTP_PROXY=1", "HTTPS_PROXY=1", "NO_PROXY=1", "http_proxy=1", "https_proxy=1", "no_proxy=1", "SSL_CERT_FILE=1", "SSL_CERT_DIR=1",
		"OP_SESSION_a=1", "XDG_RUNTIME_DIR=1", "LC_ALL=1",
	}
	all := append(slices.Clone(needed), "UNRELATED=1", "OPX=1", "=", "AWS_SECRET_ACCESS_KEY=1", "SRC=1", "VAULT_ADDR=1", "VAULT_TOKEN=1", "AGE_IDENTITY=1", "SOPS_AGE_KEY_FILE=1")
	for _, c := range []struct {
		source string
		want   []string
	}{
		{"env:SRC", append(slices.Clone(needed), "SRC=1")},
		{"op://v/i/f", needed},
		{"keychain:s/a", needed},
		{"vault:p:k", append(slices.Clone(needed), "VAULT_ADDR=1", "VAULT_TOKEN=1")},
		{"age:/p", append(slices.Clone(needed), "AGE_IDENTITY=1", "SOPS_AGE_KEY_FILE=1")},
		{"cmd:true", all},
	} {
		want := append(slices.Clone(c.want), "GOTRACEBACK=none")
		if got := childEnv(all, []Ref{{"A", c.source}}); !slices.Equal(got, want) {
			t.Errorf("environment for %s = %q, want %q", c.source, got, want)
		}
	}
}

// If a resolver's answer is invalid, none of its output is shown or used.
func TestResolverChildAnswersWrongly(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		script string
		code   fail.Code
		want   string
	}{
		"no JSON":          {"echo " + sentinel, fail.Secret, "its output is invalid"},
		"half an answer":   {`echo '{"values":{"A":"U0VO'`, fail.Secret, "its output is invalid"},
		"no value":         {`echo '{"values":{"B":"U0VO"}}'`, fail.Secret, "secret A (env): no value was returned"},
		"an exit code":     {`echo '{"values":{"A":"U0VO"}}'; exit 3`, fail.Secret, "exit status 3"},
		"another's code":   {`echo '{"failed":{"A":{"code":2,"error":"bad reference"}}}'`, fail.Usage, "bad reference"},
		"one code for all": {`echo '{"failure":{"code":5,"error":"no reader"}}'`, fail.Host, "no reader"},
		"too long":         {`printf '{"values":{"A":"'; yes U0VO | tr -d '\n' | head -c 40000000; printf '"}}'`, fail.Secret, "its output is invalid"},
		"cannot be called": {"", fail.Secret, "permission denied"},
	} {
		self := write(t, dir, "resolver", "#!/bin/sh\n"+c.script+"\n", 0o600)
		if c.script != "" {
			if err := os.Chmod(self, 0o700); err != nil { //nolint:gosec // a program
				t.Fatal(err)
			}
		}
		got, err := ResolveInChild(t.Context(), self, []Ref{{"A", "env:X"}})
		if len(got) != 0 || fail.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "SENTINEL") {
			t.Errorf("ResolveInChild with %s = %d values, %v, want none, code %v with %q", name, len(got), err, c.code, c.want)
		}
		if err := os.Remove(self); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ResolveInChild(t.Context(), "/nonexistent", make([]Ref, MaxSecrets+1)); fail.CodeOf(err) != fail.Usage {
		t.Errorf("ResolveInChild of %d secrets = %v, want code %v", MaxSecrets+1, err, fail.Usage)
	}
}

// Errors in the communication between the two processes fail the whole request.
func TestResolverChildFails(t *testing.T) {
	if err := Main(t.Context(), strings.NewReader("[{"), io.Discard, Options{}); err == nil || !strings.HasPrefix(err.Error(), "read references: ") {
		t.Errorf("Main with half a request = %v, want \"read references: …\"", err)
	}
	padded := io.MultiReader(strings.NewReader(strings.Repeat(" ", maxRequest)), strings.NewReader("[]"))
	if err := Main(t.Context(), padded, io.Discard, Options{}); err == nil {
		t.Error("Main with a request over the bound = nil, want an error")
	}
	t.Setenv("TOKEN_SRC", sentinel)
	request := `[{"name":"A","source":"env:TOKEN_SRC"}]`
	if err := Main(t.Context(), strings.NewReader(request), brokenWriter{}, Options{}); err == nil || !strings.HasPrefix(err.Error(), "write values: ") {
		t.Errorf("Main with a broken writer = %v, want \"write values: …\"", err)
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

// A cancelled resolver kills the commands that it runs, which keep the FIFO open.
func TestCancelEndsTheCommands(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, resolve := range map[string]func(context.Context, []Ref) error{
		"here": func(ctx context.Context, refs []Ref) error {
			_, err := Resolve(ctx, refs, Options{Timeout: patient})
			return err
		},
		"in a child": func(ctx context.Context, refs []Ref) error {
			_, err := ResolveInChild(ctx, self, refs)
			return err
		},
	} {
		fifo := filepath.Join(t.TempDir(), "fifo")
		if err := syscall.Mkfifo(fifo, 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- resolve(ctx, []Ref{{"A", "cmd:exec >" + fifo + "; echo runs; sleep 1000 & sleep 1000"}})
		}()
		f, err := os.Open(fifo)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(f, make([]byte, len("runs\n"))); err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: cancelled Resolve = %v, want %v", name, err, context.Canceled)
		}
		if rest, err := io.ReadAll(f); err != nil || len(rest) > 0 { // ends when all of them have ended
			t.Errorf("%s: output after the cancel = %q, %v, want none", name, rest, err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func write(t *testing.T, dir, name, content string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// A reference that is accepted stays the same when it is read again, and an error never quotes
// the source.
func FuzzParseRef(f *testing.F) {
	for _, s := range []string{"op://v/i/f", "env:X", "file:/a", "cmd:x", "vault:a/b:c", "keychain:s/a", "age:/a/../b", "vault:::", "age:~"} {
		f.Add(s)
	}
	f.Setenv("HOME", "/home/u")
	f.Fuzz(func(t *testing.T, source string) {
		r, err := ParseRef("X", source)
		if err != nil {
			if len(source) > 16 && strings.Contains(err.Error()+fail.HintOf(err), source) {
				t.Errorf("ParseRef(%q) = %v, want an error without the source", source, err)
			}
			return
		}
		if again, err := ParseRef("X", r.Source); err != nil || again != r || r.Kind() == "" {
			t.Errorf("ParseRef of %q = %+v, %v, want %+v", r.Source, again, err, r)
		}
		if path, key := r.vault(); r.Kind() == Vault && r.Source != "vault:"+path+":"+key {
			t.Errorf("parts of %q = %q, %q", r.Source, path, key)
		}
		if service, account := r.keychain(); r.Kind() == Keychain && r.Source != "keychain:"+service+"/"+account {
			t.Errorf("parts of %q = %q, %q", r.Source, service, account)
		}
	})
}
