package trust

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// inContainer is where containers have the guest's bundle: in a file system that no image
// includes.
const inContainer = "/dev/agent-sessionizer-ca.pem"

// script is the file that calls Runc, from provision/20-docker.sh.
const script = "/usr/local/sbin/runc"

// Variables are those by which programs find certificates to trust, where they do not use the
// system's. provision/files/profile.sh sets the same in the guest.
var Variables = []string{
	"SSL_CERT_FILE", // OpenSSL, Go, Python's ssl and httpx, Rust's rustls-native-certs
	"NODE_EXTRA_CA_CERTS",
	"REQUESTS_CA_BUNDLE", // Python's requests and pip
	"CURL_CA_BUNDLE",
	"GIT_SSL_CAINFO",
	"AWS_CA_BUNDLE",
}

// Runc replaces this process by the real runc, after it gave the container that args start, or
// the process that they start in one, the guest's certificates. dockerd, containerd and
// BuildKit look for runc in PATH, where a script that calls this comes first.
//
// A container that cannot be changed starts without the certificates.
func Runc(g sys.Guest, args []string) error {
	if _, err := os.Stat(g.Path(ownFile)); err == nil { // otherwise the guest trusts no gateway
		if err := changeContainer(args); err != nil {
			fmt.Fprintln(os.Stderr, "agent-guest: certificates for the container:", err)
		}
	}
	real, err := realRunc()
	if err != nil {
		return err
	}
	return syscall.Exec(real, append([]string{"runc"}, args...), os.Environ())
}

func realRunc() (string, error) {
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/bin", "/usr/sbin") {
		path := filepath.Join(dir, "runc")
		if info, err := os.Stat(path); err == nil && info.Mode()&0o111 != 0 && path != script {
			return path, nil
		}
	}
	return "", errors.New("runc is not installed")
}

// changeContainer changes the file that describes what runc is to start (OCI runtime
// specification, config.md).
func changeContainer(args []string) error {
	switch {
	case slices.Contains(args, "create") || slices.Contains(args, "run"):
		dir := option(args, "--bundle", "-b")
		return edit(filepath.Join(dir, "config.json"), func(config map[string]any) {
			mounts, _ := config["mounts"].([]any)
			config["mounts"] = append(mounts, map[string]any{
				"destination": inContainer, "type": "bind", "source": bundle, "options": []string{"rbind", "ro", "rprivate"},
			})
			if process, ok := config["process"].(map[string]any); ok {
				addVariables(process)
			}
		})
	case slices.Contains(args, "exec"):
		if file := option(args, "--process", "-p"); file != "" {
			return edit(file, addVariables)
		}
	}
	return nil
}

// option returns the value of an option, which follows it as an argument or after "=".
func option(args []string, names ...string) string {
	for i, a := range args {
		name, value, joined := strings.Cut(a, "=")
		switch {
		case !slices.Contains(names, name):
		case joined:
			return value
		case i+1 < len(args):
			return args[i+1]
		}
	}
	return ""
}

// addVariables adds those of Variables that a process does not have.
func addVariables(process map[string]any) {
	env, _ := process["env"].([]any)
	for _, name := range Variables {
		has := slices.ContainsFunc(env, func(v any) bool { text, _ := v.(string); return strings.HasPrefix(text, name+"=") })
		if !has {
			env = append(env, name+"="+inContainer)
		}
	}
	process["env"] = env
}

// edit changes a JSON file. Numbers stay as they are written.
func edit(path string, change func(map[string]any)) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	object := map[string]any{}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(&object); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	change(object)
	if text, err = json.Marshal(object); err != nil {
		return err
	}
	return atomicfile.WriteUnflushed(path, text, info.Mode().Perm())
}
