package script

import (
	"bytes"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"testing"
)

// TestLittleHappensBeforeMain limits what packages do before main. Every command pays for
// it, as does each prompt that requests a completion. Three processes of every session hold
// that memory for their lifetime. The test counts bytes, not time, because bytes are the
// same everywhere.
func TestLittleHappensBeforeMain(t *testing.T) {
	const (
		most    = 1 << 20 // for one package
		mostSum = 3 << 20
	)
	cmd := exec.CommandContext(t.Context(), binary, "--help")
	cmd.Env = append(os.Environ(), "GODEBUG=inittrace=1", "HOME="+t.TempDir())
	var trace bytes.Buffer
	cmd.Stderr = &trace
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^init (\S+) @.* clock, (\d+) bytes`).FindAllStringSubmatch(trace.String(), -1)
	if len(found) < 50 {
		t.Fatalf("packages in the trace = %d, want at least 50:\n%s", len(found), trace.String())
	}
	sum := 0
	for _, m := range found {
		n, _ := strconv.Atoi(m[2])
		if sum += n; n > most {
			t.Errorf("bytes that %s allocates before main = %d, want at most %d", m[1], n, most)
		}
		// The real package fills seven megabytes of tables, which are not allocated and
		// thus not counted.
		if m[1] == "github.com/google/gopacket/layers" {
			t.Errorf("linked package = %s, want third_party/gopacket in its place", m[1])
		}
	}
	if sum > mostSum {
		t.Errorf("bytes allocated before main = %d, want at most %d", sum, mostSum)
	}
}

// TestUnusedMethodsAreLeftOut fails if the linker keeps every exported method of every
// type, which makes the program about 7 MB larger. A reachable call of
// reflect.Value.MethodByName is enough for that, and text/template has one.
func TestUnusedMethodsAreLeftOut(t *testing.T) {
	program, err := os.ReadFile(binary)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(program, []byte("reflect.(*Value).MethodByName")) {
		t.Error("the linker kept unused methods; what looks up methods by name: go build -ldflags=-dumpdep ./cmd/agent-sessionizer 2>&1 | grep '<ReflectMethod>'")
	}
}
