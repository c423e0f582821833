package secret

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/reexec"
)

const (
	sentinel = "SENTINEL-4f2c/9+x y"
	// patient is for what ends by itself, however slow the machine.
	patient = 5 * time.Minute
)

// TestMain lets this binary be the resolver child of ResolveInChild.
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
	os.Exit(reexec.Run(m))
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
			t.Errorf("a value printed itself: %s", s)
		}
	}
	if v.Reveal() != sentinel || (Value{}).Reveal() != "" {
		t.Error("Reveal does not return the content")
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
		{"X", "vault:x", ""},
		{"X", "cmd:" + strings.Repeat("x", 5000), ""},
	} {
		r, err := ParseRef(c.name, c.source)
		if c.want == "" {
			if fail.CodeOf(err) != fail.Usage || strings.Contains(fmt.Sprint(err, fail.HintOf(err)), "SENTINEL") {
				t.Errorf("ParseRef(%q, %q) = %v, %q; want a usage error that does not repeat the source", c.name, c.source, err, fail.HintOf(err))
			}
			continue
		}
		if err != nil || r.Source != c.want || r.Name != c.name {
			t.Errorf("ParseRef(%q, %q) = %v, %v", c.name, c.source, r, err)
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
		{"D", "cmd:false"},
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
		t.Errorf("Check found %s", s)
	}
	if w := Warnings(refs); len(w) != 2 || !strings.Contains(w[0], "secret B") || !strings.Contains(w[1], "secret H") {
		t.Errorf("Warnings = %q", w)
	}
	if errs := Check(make([]Ref, MaxSecrets+1)); len(errs) != MaxSecrets+1 || !strings.Contains(errs[0].Error(), "limit") {
		t.Errorf("too many secrets: %d errors", len(errs))
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
	}, Options{Timeout: patient})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"A": sentinel, "B": sentinel, "C": pem, "D": sentinel, "E": "with-a-child-left-behind"} {
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
		{"cmd:echo '" + sentinel + "'; echo '" + sentinel + "' >&2; exit 3", "exit status 3"},
		{"cmd:echo '" + sentinel + "'; sleep 1000", tooLong},
		{"cmd:yes '" + sentinel + "'", "larger than the limit"},
		{"cmd:true", "empty"},
		{"cmd:read x </dev/tty && echo $x", "exit status"},
	} {
		opts := Options{Timeout: patient}
		if c.want == tooLong {
			opts.Timeout = time.Second
		}
		_, err := Resolve(t.Context(), []Ref{{"TOKEN", c.source}}, opts)
		if fail.CodeOf(err) != fail.Secret || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "secret TOKEN (") {
			t.Errorf("%.40s: %v, want a secret error with %q", c.source, err, c.want)
			continue
		}
		if s := err.Error() + fail.HintOf(err); strings.Contains(s, "SENTINEL") {
			t.Errorf("%.40s: the error repeats the content: %s", c.source, s)
		}
	}
	_, err := Resolve(t.Context(), []Ref{{"A", "env:IS_NOT_SET"}, {"B", "cmd:false"}, {"C", "cmd:echo fine"}}, Options{})
	if err == nil || !strings.Contains(err.Error(), "secret A") || !strings.Contains(err.Error(), "secret B") || strings.Contains(err.Error(), "secret C") {
		t.Errorf("several failures: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Resolve(ctx, []Ref{{"A", "cmd:sleep 1000"}}, Options{}); err == nil || ctx.Err() == nil {
		t.Errorf("a cancelled Resolve returned %v", err)
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
		t.Errorf("A = %q", got["A"].Reveal())
	}
	if line := got["B"].Reveal(); !strings.HasSuffix(strings.TrimSpace(line), ChildCommand) {
		t.Errorf("the child's arguments are %q", line)
	}

	_, err = ResolveInChild(t.Context(), self, []Ref{{"A", "env:IS_NOT_SET"}})
	if fail.CodeOf(err) != fail.Secret || fail.HintOf(err) != "export IS_NOT_SET=…" {
		t.Errorf("error from the child: %v, hint %q", err, fail.HintOf(err))
	}

	t.Setenv("OP_TEST_CRASH", "1")
	_, err = ResolveInChild(t.Context(), self, []Ref{{"A", "env:TOKEN_SRC"}})
	if fail.CodeOf(err) != fail.Secret || strings.Contains(err.Error(), "SENTINEL") {
		t.Errorf("a crashed child: %v", err)
	}
	if got, err := ResolveInChild(t.Context(), "/nonexistent", nil); err != nil || len(got) != 0 {
		t.Errorf("no secrets: %v, %v", got, err)
	}

	env := strings.Join(childEnv([]string{"PATH=/bin", "UNRELATED=x", "OP_SESSION_a=y", "SRC=z"}, []Ref{{"A", "env:SRC"}}), " ")
	if env != "PATH=/bin OP_SESSION_a=y SRC=z GOTRACEBACK=none" {
		t.Errorf("the child's environment is %s", env)
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
