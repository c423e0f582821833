package secrets

import (
	"bufio"
	"fmt"
	"io"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// Credential acts as git's credential helper. For "get" it writes the session's token
// for GitHub over HTTPS, and nothing for any other host. It stores nothing: it
// ignores "store" and "erase".
func Credential(g sys.Guest, action string, in io.Reader, out io.Writer) error {
	if action != "get" {
		return nil
	}
	asked := map[string]string{}
	lines := bufio.NewScanner(io.LimitReader(in, 64<<10))
	for lines.Scan() && lines.Text() != "" {
		if key, value, ok := strings.Cut(lines.Text(), "="); ok {
			asked[key] = value
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read git's request: %w", err)
	}
	if asked["protocol"] != "https" || !servesToken(asked["host"]) {
		return nil
	}
	for _, name := range []string{"GITHUB_TOKEN", "GH_TOKEN"} {
		token := strings.TrimSpace(g.Text(sys.SecretDir + "/secrets/" + name))
		if token == "" {
			continue
		}
		if strings.ContainsAny(token, "\r\n\x00") {
			return fail.New(fail.Secret, "%s must be one line for git to use it", name)
		}
		_, err := fmt.Fprintf(out, "username=x-access-token\npassword=%s\n", token)
		return err
	}
	return nil
}

// servesToken reports whether a GitHub token belongs to a host. A host with a port
// is another service.
func servesToken(host string) bool {
	host = strings.ToLower(host)
	return host == "github.com" || host == "gist.github.com"
}
