package testenv_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const role = "REEXEC_TEST_ROLE" // "orphan", "tests", "" for the test itself

func TestMain(m *testing.M) {
	if os.Getenv(role) == "orphan" {
		fmt.Println(os.Getpid())
		for {
			_ = syscall.Pause()
		}
	}
	os.Exit(testenv.Run(m))
}

// Tests that are killed leave no process of theirs, though it has a process session of
// its own.
func TestKilledTestsLeaveNoProcess(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv(role) == "tests" {
		other := exec.Command("sh", "-c", "exec sleep 600") //nolint:noctx // it is to be left
		other.Stdout, other.SysProcAttr = os.Stdout, &syscall.SysProcAttr{Setsid: true}
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(self) //nolint:noctx // it is to be left
		cmd.Env, cmd.Stdout, cmd.SysProcAttr = append(os.Environ(), role+"=orphan"), os.Stdout, &syscall.SysProcAttr{Setsid: true}
		t.Fatal(cmd.Run())
	}
	program, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "go-build1", "reexec.test") // as if it were another run
	if err := os.Mkdir(filepath.Dir(other), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(other, program, 0o700); err != nil {
		t.Fatal(err)
	}
	tests := exec.Command(other, "-test.run=^"+t.Name()+"$") //nolint:noctx // it is killed below
	tests.Env = append(os.Environ(), role+"=tests", "AGENT_TEST_WATCHED=")
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	tests.Stdout = write
	if err := tests.Start(); err != nil {
		t.Fatal(err)
	}
	_ = write.Close() // the tests and their child have it
	if err := read.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	out := bufio.NewReader(read)
	line, err := out.ReadString('\n')
	pid, perr := strconv.Atoi(strings.TrimSpace(line))
	if err != nil || perr != nil {
		t.Fatalf("pid of the child = %q, %v, want a number", line, err)
	}
	if err := tests.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = tests.Wait()
	if _, err := io.Copy(io.Discard, out); err != nil { // the end comes when no process has the pipe
		t.Errorf("process %d runs after the test was killed, want it ended: %v", pid, err)
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}
