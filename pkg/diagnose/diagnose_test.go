package diagnose

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

func finish(t *testing.T, c *Collection) map[string]Part {
	t.Helper()
	b, err := c.Finish()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]Part{}
	for _, p := range b.Parts {
		all[p.Name] = p
	}
	return all
}

// The start of a line that does not fit could be the rest of a secret, which nothing recognizes.
func TestOnlyWholeLines(t *testing.T) {
	const value = "a-secret-that-is-cut-in-two"
	file := filepath.Join(t.TempDir(), "log")
	rest := strings.Repeat("x", MaxPart-len(value)/2-1) + "\n"
	if err := os.WriteFile(file, []byte(strings.Repeat("first\n", 1000)+value+"\n"+rest), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &Collection{Redact: secret.NewRedactor(secret.NewValue(value))}
	c.AddFile("file", "", file)
	c.Add("text", "", append([]byte(value+"\n"), rest...), nil)
	for name, p := range finish(t, c) {
		if p.text != rest {
			t.Errorf("%s starts with %.40q", name, p.text)
		}
	}
}

func TestLimitOfAll(t *testing.T) {
	c := &Collection{Redact: secret.NewRedactor()}
	for range 2 * maxAll / MaxPart {
		c.Add("part", "", bytes.Repeat([]byte("line\n"), MaxPart/5), nil)
	}
	sum := 0
	b, err := c.Finish()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range b.Parts {
		sum += p.Bytes
	}
	if sum > maxAll || sum < maxAll-2*MaxPart {
		t.Errorf("%d bytes", sum)
	}
}

// A secret that is recognized by its form in one part is removed from all, also where it has another form.
func TestFoundInOnePart(t *testing.T) {
	c := &Collection{Redact: secret.NewRedactor(), Home: "/home/me"}
	c.Add("first", "", []byte("token in base64: "+base64.StdEncoding.EncodeToString([]byte("ghp_0a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R"))+"\n"), nil)
	c.Add("second", "", []byte("\x1b[1mghp_0a1B2c\x1b[0m3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R in /home/me/x\n"), nil)
	parts := finish(t, c)
	if text := parts["first"].text; !strings.HasPrefix(text, "token in base64: [redacted]") || strings.Contains(text, "Z2hwXz") {
		t.Errorf("first is %q", text)
	}
	if want := "[redacted] in ~/x\n"; parts["second"].text != want {
		t.Errorf("second is %q, not %q", parts["second"].text, want)
	}
	if parts["second"].Redacted != 1 {
		t.Errorf("%d replacements are reported", parts["second"].Redacted)
	}
}

func TestWhatCannotBeRead(t *testing.T) {
	dir := t.TempDir()
	c := &Collection{Redact: secret.NewRedactor()}
	c.AddFile("missing", "", filepath.Join(dir, "missing"))
	c.AddFile("directory", "", dir)
	c.Add("failed", "", []byte("some\n"), errors.New("disk error"))
	parts := finish(t, c)
	if len(parts) != 1 || parts["failed"].text != "some\ncannot be read: disk error\n" {
		t.Errorf("the parts are %+v", parts)
	}
}

func TestWriteNew(t *testing.T) {
	c := &Collection{Redact: secret.NewRedactor()}
	c.Add("a/b.txt", "", []byte("content\n"), nil)
	b, err := c.Finish()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "x.tar.gz")
	if err := b.WriteNew(file, "top"); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(file); err != nil || st.Mode() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	unzip, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	in := tar.NewReader(unzip)
	h, err := in.Next()
	if err != nil || h.Name != "top/a/b.txt" {
		t.Fatalf("%+v, %v", h, err)
	}
	if text, err := io.ReadAll(in); err != nil || string(text) != "content\n" {
		t.Errorf("%q, %v", text, err)
	}
	if err := b.WriteNew(file, "top"); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("a second archive: %v", err)
	}
	if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, content) {
		t.Errorf("the file has changed: %v", err)
	}
	if err := b.WriteNew(filepath.Join(t.TempDir(), "none", "x"), "top"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("in a directory that does not exist: %v", err)
	}
}

const token = "ghp_0a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R"

// only returns the text of an archive's only part.
func only(t *testing.T, c *Collection, text string) string {
	t.Helper()
	c.Add("part", "", []byte(text), nil)
	return finish(t, c)["part"].text
}

func TestForms(t *testing.T) {
	key := "-----BEGIN OPENSSH PRIVATE KEY-----\n" + strings.Repeat("b3BlbnNzaC1rZXktdjEAAAAABG5vbmU0123456789\n", 5)
	for name, test := range map[string]struct{ text, want string }{
		"a comment that gitleaks obeys": {"token " + token + " gitleaks:allow\n", "token [redacted] gitleaks:allow\n"},
		"a token in base64":             {"got " + base64.StdEncoding.EncodeToString([]byte(token)) + " end\n", "got [redacted]g== end\n"},
		"a password with @":             {"see https://me:p@ss@host/x\n", "see https://[redacted]@host/x\n"},
		"a token in a URL":              {"see https://abc@host/x or https://host/@x\n", "see https://[redacted]@host/x or https://host/@x\n"},
		"a header":                      {"> Authorization: Basic bWU6eA==\r\n> Accept: */*\r\n", "> Authorization: [redacted]\n> Accept: */*\n"},
		"a header in JSON":              {`{"m":"-H \"cookie: a=b\" x"}`, `{"m":"-H \"cookie: [redacted]\" x"}`},
		"a short password":              {"password=abc user=me\n", "password=[redacted] user=me\n"},
		"a password in JSON":            {`{"password":"a b\"c","user":"me"}`, `{"password":"[redacted]","user":"me"}`},
		"the beginning of a key":        {"a log:\n" + key, "a log:\n[redacted]\n"},
		"the end of a key":              {"end of a log.\n" + key[100:] + "bQ==\n-----END OPENSSH PRIVATE KEY-----\nmore\n", "end of a log.\n[redacted]\nmore\n"},
		"the end of a key in JSON":      {`{"m":"` + strings.ReplaceAll(key[100:], "\n", `\n`) + `-----END RSA PRIVATE KEY-----\n"}`, `{"m":"[redacted]\n"}`},
	} {
		if text := only(t, &Collection{Redact: secret.NewRedactor()}, test.text); text != test.want {
			t.Errorf("%s: got %q, want %q", name, text, test.want)
		}
	}
}

// Programs wrap what they print at the width of a terminal, and base64 at 76 characters.
func TestWrappedSecret(t *testing.T) {
	const value = "a-rather-long-secret-of-this-host-0123456789"
	redact := secret.NewRedactor(secret.NewValue(value))
	text := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("#", 40) + value + strings.Repeat("#", 40)))
	for name, test := range map[string]struct{ text, want string }{
		"base64":      {text[:76] + "\n" + text[76:] + "\n", text[:54] + "[redacted]\n" + text[112:] + "\n"},
		"indentation": {"secret: a-rather-long\n  -secret-of-this\n  -host-0123456789 end\n", "secret: [redacted]\n  \n   end\n"},
		"none":        {"a-rather-long\n\n  other\n", "a-rather-long\n\n  other\n"},
	} {
		if got := only(t, &Collection{Redact: redact}, test.text); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}

// A guest that fills its console with texts that look like secrets must not make the archive take hours,
// nor get any of them into it.
func TestManySecrets(t *testing.T) {
	n := 0
	tokens := func(most int) []byte {
		var text bytes.Buffer
		for end := n + most; n < end && text.Len() < MaxPart-100; n++ {
			fmt.Fprintf(&text, "ghp_%.36x\n", sha256.Sum256([]byte{byte(n), byte(n >> 8), byte(n >> 16)}))
		}
		return text.Bytes()
	}
	start := time.Now()
	c := &Collection{Redact: secret.NewRedactor()}
	for range 10 {
		c.Add("many", "", tokens(MaxPart), nil)
		c.Add("some", "", tokens(maxFound), nil)
	}
	b, err := c.Finish()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range b.Parts {
		if strings.Contains(p.text, "ghp_") || strings.HasPrefix(p.text, "left out: ") != (p.Name == "many") {
			t.Errorf("%s is %.100q", p.Name, p.text)
		}
	}
	if took := time.Since(start); took > time.Minute {
		t.Errorf("it took %v", took)
	}
}

func TestHomeDirectory(t *testing.T) {
	for home, want := range map[string]string{"/home/me": "~/x, /home/melissa and ~.\n", "/": "/home/me/x, /home/melissa and /home/me.\n"} {
		c := &Collection{Redact: secret.NewRedactor(), Home: home}
		if got := only(t, c, "/home/me/x, /home/melissa and /home/me.\n"); got != want {
			t.Errorf("with home %s: got %q, want %q", home, got, want)
		}
	}
}
