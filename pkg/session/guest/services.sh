# Starts the services of the compose file $file, and waits until they run or are healthy.
services() { docker compose --file "$file" "$@"; }
if ! services up --detach --wait --wait-timeout 600; then
	services ps --all
	# It also fails if a service has ended after its work, which is not a failure.
	fine=$(services ps --all --format '{{.State}}/{{.ExitCode}}/{{.Health}} {{.Service}}' | sed -n -E 's,^(running/0/(healthy)?|exited/0/[a-z]*) ,,p' | sort -u)
	[ "$fine" = "$(services config --services | sort -u)" ] || exit 1
fi
services ps --all
